"""A cluster under a simulated clock and network: the real protocol code, one thread, repeatable byte for byte.

loop      the clock, and an event loop for each simulated process    checks    what must hold, outside the code under test
network   who reaches whom, how fast; crashes, pauses, partitions    load      clients, and what each answer must be
rpc       gRPC's surface over that network                           faults    what goes wrong when, drawn from the seed
data      the shm and tcp transports over it                         mutants   guards taken out one at a time
engine    a mock engine on simulated time                            run       one run: build, disturb, calm down, judge
cluster   starts and ends processes: the real `serve` functions      profiles  sizes and times of clusters
"""
