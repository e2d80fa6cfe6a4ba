"""What a child process runs when it starts."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Ends this process when its parent ends; if the parent is killed, it would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
