"""Read event files."""


def events(workdir):
    """Yield the events of all files, parsed as the format is defined, in the order of names."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length u64, its crc u32, payload, its crc u32
            size = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
