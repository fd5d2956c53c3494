"""Episodes of several turns: tools, environments, and what a model writes to call them."""
