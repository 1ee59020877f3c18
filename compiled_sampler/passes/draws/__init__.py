"""The draw of a token: the race over a row, in one pass or in two, and the race of its candidates."""
