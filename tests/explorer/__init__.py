"""A model checker for the handoff: every state of the real grant machines under a hostile network, to the fixpoint.

bounds         what one exploration covers        product        possible steps, safety in every state
codec          machines to tuples and back        search         breadth first, shortest trace
messages       names for events                   calm           liveness: calm walks from every state
receiver_part  one side with its shell            mutants        broken machines that must be found out
writer_part    the other                          runs           the explorations of the tests, and larger ones
data_path      bytes under way and landed         network        messages without other effect
"""
