"""What the data of engines says: findings, comparisons, what to fuse next, and the tables of one engine."""
