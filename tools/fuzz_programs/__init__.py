"""Random annotated programs: on several devices, they must give the results of one device.

    python -m tools.fuzz_programs --log=LOG --first=0 --count=10000
    python -m tools.fuzz_programs --summary=LOG
    python -m tools.fuzz_programs --shrink=SEED

See __main__.py.
"""
