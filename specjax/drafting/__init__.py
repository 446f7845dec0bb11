"""What drafters are made of: base classes, chains, trees, and the tables and theory behind them."""
