"""What masks and biases share: they are evaluated at blocks of positions."""
