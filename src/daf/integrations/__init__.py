"""Adapters to training loops of other libraries, a file for each; DAF itself imports none of them.

An adapter speaks its host's language and owns no logic: the host prepares batches, computes losses,
accumulates, clips, scales, schedules, saves; each backward pass becomes one ``session.backward``.
"""
