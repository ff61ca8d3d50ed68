"""What mixes the rows of a recurrent layer, in attention's place or beside it (models/recurrence.py)."""
