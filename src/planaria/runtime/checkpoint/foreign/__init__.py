"""Checkpoint folders of other programs, out and in: torch's DCP, DeepSpeed's universal layout, Hugging Face's weights.

Writing for others is the one place where pickle leaves the house. Theirs is read in a process of its own with bounded
memory (``reading.py``, started by ``common/apart.py``), by readers that know tensors and nothing else
(``unpickling.py``).
"""
