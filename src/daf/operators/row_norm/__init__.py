"""Layer and RMS normalisation, which keep a code of the normalised value."""
