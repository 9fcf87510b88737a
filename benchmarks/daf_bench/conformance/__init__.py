"""``daf bench conformance``: models and situations that nobody here chose, three ways each.

Plain PyTorch, sessions and ``compress`` at ``tolerance=0`` under plans that force every lever in
turn, and codes. ``case`` says what a case is; ``modules``, ``operators``, ``families``, ``vision``
and ``situations_*`` list them. ``ways`` trains a case one way, ``compare`` holds two ways against
each other, ``trial`` judges a case, ``pool`` gives each a process of its own.
"""
