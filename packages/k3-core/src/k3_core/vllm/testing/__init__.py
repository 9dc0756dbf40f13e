"""Tests of a vendor's model that every vendor runs on a CPU: the layers are the real ones, kernels are contracts.

vendor        which wheel is meant, and making it the acting one in this process
engine        vLLM's engine in this process
ranks         ranks and stages emulated by threads, caches full of NaN
gloo          ranks as processes
suite_plugin  the entry point
suite_ranks   tensor, expert and pipeline parallelism, auxiliary states, warm-up, images over ranks
suite_load    what becomes of weights
suite_launch  what layers hand to kernels, and that decoding reads nothing back to the host
suite_refuse  what is refused before weights load
suite_serve   greedy tokens in vLLM's real engine

A suite is a class; a vendor's test module subclasses it and names the vendor. They need pytest and a CPU build of vLLM
0.32; a vendor's ``conftest.py`` registers this package for pytest's assertion rewriting.
"""
