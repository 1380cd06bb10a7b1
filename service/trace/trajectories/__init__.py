"""Records of trajectories for people: `records` samples and reads them, `terminal` and `page` show them."""
