"""One transition of the network, linearised: where it is cut, and how weights, rows and features correspond."""
