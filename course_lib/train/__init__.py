"""Training on several ranks: data, models, and one wrapper a strategy."""
