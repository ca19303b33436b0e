#!/usr/bin/env python3
"""Makes tests/data/events with TensorBoard's own classes (PyPI: tensorboard).

    make_event_fixture.py

The test is tests/unit/formats/event_file_test.cpp, which has the same values.
"""

import pathlib

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

MANY_SAMPLES = 5_000_000_000


def summary(**values):
    return Summary(value=[Summary.Value(tag="Train/Samples/" + name, simple_value=value)
                          for name, value in values.items()])


EVENTS = [
    Event(wall_time=1.7e9, file_version="brain.Event:2"),
    Event(wall_time=1.7e9, step=4, session_log=SessionLog(status=SessionLog.START)),
    Event(wall_time=1.7e9 + 0.25, step=4,
          summary=summary(train_loss=5.5625, lr=1e-3, nvme_bytes_written=0.0)),
    Event(wall_time=1.7e9 + 0.5, step=MANY_SAMPLES,
          summary=summary(train_loss=float("inf"), lr=-0.1))]


def main():
    folder = pathlib.Path(__file__).parent / "events"
    folder.mkdir(exist_ok=True)
    with open(folder / "events.out.tfevents.1700000000.host.1.0", "wb") as file:
        writer = RecordWriter(file)
        for event in EVENTS:
            writer.write(event.SerializeToString())


if __name__ == "__main__":
    main()
