"""Where codes live: buffers, and the codecs that fill and read them."""
