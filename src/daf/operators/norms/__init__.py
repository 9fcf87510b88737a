"""The normalised value as a code: made in forward, read in backward, by channel or by row."""
