"""What a score has besides products of tokens, and its arrays."""
