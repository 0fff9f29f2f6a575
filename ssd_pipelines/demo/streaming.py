"""Work that reports as it goes, for pages: a blocking call becomes a generator that can be closed at any time."""

from collections.abc import Callable, Generator
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeVar


Progress = TypeVar("Progress")
Result = TypeVar("Result")


def stream(work: Callable[[Callable[[Progress], bool]], Result]) -> Generator[Progress, None, Result]:
    """Run `work` in a thread and yield what it reports; the generator returns what `work` returns.

    Args:
        work: gets a function `report(progress)`, which returns `True` when the work should stop.

    Raises:
        Exception: what `work` raises. Closing the generator makes `report` return `True`, and waits for `work` to end.

    Example:
        >>> list(stream(lambda report: [report(number) for number in range(3)]))[-1]
        2
    """
    queue: SimpleQueue[tuple[str, object]] = SimpleQueue()
    stopped = Event()

    def report(progress: Progress) -> bool:
        queue.put(("progress", progress))
        return stopped.is_set()

    def run() -> None:
        try:
            queue.put(("result", work(report)))
        except BaseException as error:
            queue.put(("error", error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = queue.get()
            while kind == "progress" and not queue.empty():  # a slow reader gets the newest report only
                kind, value = queue.get()
            if kind == "error":
                raise value  # type: ignore[misc]
            if kind == "result":
                return value  # type: ignore[return-value]
            yield value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
