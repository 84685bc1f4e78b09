"""Kind ``custom``: the user's generate function, in processes of its own."""
