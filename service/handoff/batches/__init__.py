"""From complete groups to a mini-batch: score, filter, pack."""
