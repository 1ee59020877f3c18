"""What lies beyond the candidates: a row's threshold, its race over all tokens, the check of a winner."""
