"""What planaria can do, as functions of a program: the face in ``planaria/__init__.py``, and what commands call."""
