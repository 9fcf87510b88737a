"""The normalised value as a code, made in forward and read in backward, by channel or by row."""
