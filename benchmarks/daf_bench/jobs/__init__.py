"""DAF's jobs at their real size: what ``daf train`` holds and takes on them."""
