"""All that names the private parts of Inductor, Dynamo and Triton's runtime, behind one guard and one lock.

``versions`` holds both. On a torch that it does not know, ``patches``, ``compilation`` and ``layout_guards`` use public
functions alone: the same results, slower. Private names are imported where they are used, because that takes a second.
"""
