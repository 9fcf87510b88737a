"""Where saved activations live: codes and the buffers that hold them."""
