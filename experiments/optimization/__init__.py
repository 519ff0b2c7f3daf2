"""Loss, optimizer and one pure parameter update."""
