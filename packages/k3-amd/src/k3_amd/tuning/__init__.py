"""Launch choices as data. No AMD device was available: none of them was measured, see each file."""
