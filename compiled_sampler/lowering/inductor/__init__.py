"""All that names the private parts of Inductor, Dynamo and Triton's runtime, behind one guard and one lock.

``versions`` holds the guard, ``exact.triton`` the lock. On a torch that ``versions`` does not know, ``patches``,
``compilation`` and ``alike`` use public functions alone: the same results, slower. Private names are imported where
they are used, because that takes a second.
"""
