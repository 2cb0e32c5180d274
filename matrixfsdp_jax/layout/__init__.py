"""Plain data and rules: which leaf is a matrix, and who owns it."""
