"""The first thing that a child process does."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Ends this process, with status 1, as soon as its parent ends.

    Otherwise the child of a killed parent would wait for work forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_after_parent() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end this thread alone.

    threading.Thread(target=end_after_parent, daemon=True).start()
