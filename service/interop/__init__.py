"""How other code meets Baton: SkyRL's lists, and functions of the user's own."""
