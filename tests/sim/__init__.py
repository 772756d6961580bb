"""A cluster under a simulated clock and network: the real protocol code, one thread, repeatable byte for byte.

loop      the clock, an event loop for each process               checks    what must hold, outside the code under test
network   who reaches whom, and how fast                          ghosts    what a node has said, and does afterwards
rpc, calls  gRPC's surface over that network                      load      clients, and what each answer must be
data, links  the shm and tcp transports over it                   faults    what goes wrong when, drawn from the seed
engine    a mock engine on simulated time                         mutants   guards taken out one at a time
cluster   starts and ends processes: the real `serve` functions   run       one run: build, disturb, calm down, judge
profiles  sizes and times of clusters
"""
