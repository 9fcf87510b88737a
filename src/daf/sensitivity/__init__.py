"""What each saved tensor's code costs the gradient: measured, with a standard error."""
