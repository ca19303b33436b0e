"""A model of what a power cut leaves on a disk, fed by the log of tests/support/record_writes.cpp.

The bytes and the size that fsync or fdatasync of a file covers are on the disk. Each page of 4 KiB
has, independently of all others, the content after any or none of the later writes, and the size is
any that the file has had since. The entries that fsync of a directory covers are on the disk, and any
subset of the later changes of entries; a rename is one change. Entries refer to inodes, so a
rename may be there although the creation of the old name is not.
"""

import collections
import os
import pathlib
import struct

PAGE = 4096
HEADER = struct.Struct("=IIQQQ6Q")
KINDS = ("create", "write", "resize", "sync", "rename", "link", "unlink", "mkdir", "end")
Record = collections.namedtuple("Record", "kind inode folder name new_folder new_name data offset")


def read_log(path):
    log = memoryview(pathlib.Path(path).read_bytes())
    records, at = [], 0
    def take(size):
        nonlocal at
        at += size
        return bytes(log[at - size:at])
    while at < len(log):
        kind, names, new_names, size, offset, *inodes = HEADER.unpack(take(HEADER.size))
        name, new_name = take(names).decode(), take(new_names).decode()
        inode, folder, new_folder = zip(inodes[::2], inodes[1::2])
        records.append(Record(KINDS[kind], inode, folder, name, new_folder, new_name, take(size),
                              offset))
    return records


def pages(begin, size):
    return range(begin // PAGE, (begin + size + PAGE - 1) // PAGE)


class File:
    def __init__(self):
        self.durable = bytearray()
        self.size = 0  # including all pending writes
        self.pending = []  # (offset, bytes, size of the file after it)

    def write(self, offset, data):
        self.size = max(self.size, offset + len(data))
        self.pending.append((offset, data, self.size))

    def resize(self, size):
        # The truncated part reads as zeros when the file grows again.
        self.pending.append((size, bytes(max(0, self.size - size)), size))
        self.size = size

    def content(self, chosen):
        """The bytes if `chosen(n)` of n further versions of each page, and of the size, have
        reached the disk."""
        versions = collections.Counter()
        for offset, data, _ in self.pending:
            versions.update(pages(offset, len(data)))
        left = {page: chosen(number) for page, number in versions.items()}
        bytes_now = bytearray(self.durable)
        for offset, data, _ in self.pending:
            end = offset + len(data)
            if end > len(bytes_now):
                bytes_now.extend(bytes(end - len(bytes_now)))
            for page in pages(offset, len(data)):
                if left[page] > 0:
                    left[page] -= 1
                    first, last = max(offset, page * PAGE), min(end, (page + 1) * PAGE)
                    bytes_now[first:last] = data[first - offset:last - offset]
        sizes = [len(self.durable), *(size for _, _, size in self.pending)]
        size = sizes[chosen(len(sizes) - 1)]
        return bytes_now[:size] + bytes(max(0, size - len(bytes_now)))

    def sync(self):
        self.durable = self.content(lambda number: number)
        self.pending = []


class Folder:
    """Its durable entries. Changes that are not flushed belong to the disk."""


def place(entries, changes):
    for folder, name, inode in changes:
        if isinstance(inode, Folder):  # it has one name
            for others in entries.values():
                for other in [key for key, value in others.items() if value is inode]:
                    del others[other]
        entries.setdefault(folder, {}).pop(name, None)
        if inode is not None:
            entries[folder][name] = inode


class Disk:
    """Directories `roots`, which are empty and durable, and the changes of a log below them."""

    def __init__(self, roots):
        self.roots = [Folder() for _ in roots]
        self.inodes = {}
        for root, folder in zip(roots, self.roots):
            status = os.stat(root)
            self.inodes[status.st_dev, status.st_ino] = folder
        self.entries = {folder: {} for folder in self.roots}
        self.pending = []  # each entry: changes (folder, name, inode or None) that happen together

    def apply(self, record):
        """Returns whether the record changes something here."""
        folder, new_folder = (self.inodes.get(key) for key in (record.folder, record.new_folder))
        if record.kind in ("create", "mkdir"):
            self.inodes.pop(record.inode, None)  # an inode number that was used before
            if folder is None:
                return False
            self.inodes[record.inode] = File() if record.kind == "create" else Folder()
        inode = self.inodes.get(record.inode)
        if inode is None:
            return False
        if record.kind == "write":
            inode.write(record.offset, record.data)
        elif record.kind == "resize":
            inode.resize(record.offset)
        elif record.kind == "sync":
            self.sync(inode)
        elif record.kind == "rename":
            self.pending.append(((folder, record.name, None), (new_folder, record.new_name, inode)))
        elif record.kind == "link":
            self.pending.append(((new_folder, record.new_name, inode),))
        elif record.kind == "unlink":
            self.pending.append(((folder, record.name, None),))
        elif record.name:
            self.pending.append(((folder, record.name, inode),))
        return True

    def sync(self, inode):
        if isinstance(inode, File):
            inode.sync()
            return
        for changes in self.pending:
            if any(folder is inode for folder, _, _ in changes):
                place(self.entries, changes)
        self.pending = [changes for changes in self.pending
                        if all(folder is not inode for folder, _, _ in changes)]

    def draw(self, content, entry):
        """The trees of the roots. `content(n)`: number of n versions that are there; `entry()`:
        whether a change of entries is there. A tree has names and trees or files. A file is a list
        of its bytes, which all of its names share."""
        entries = {folder: dict(names) for folder, names in self.entries.items()}
        for changes in self.pending:
            if entry():
                place(entries, changes)
        files = {}
        def tree(inode):
            if isinstance(inode, Folder):
                return {name: tree(below) for name, below in entries.get(inode, {}).items()}
            if inode not in files:
                files[inode] = [inode.content(content)]
            return files[inode]
        return [tree(root) for root in self.roots]


def write_tree(tree, folder, names=None):
    """Makes the files of a tree in an existing `folder`, with hard links. Folders may exist."""
    names = {} if names is None else names
    for name, below in tree.items():
        path = os.path.join(folder, name)
        if isinstance(below, dict):
            os.makedirs(path, exist_ok=True)
            write_tree(below, path, names)
        elif id(below) in names:
            os.link(names[id(below)], path)
        else:
            names[id(below)] = path
            with open(path, "wb") as file:
                file.write(below[0])


def read_tree(folder, files=None):
    """The tree that is in `folder`."""
    files = {} if files is None else files
    tree = {}
    for entry in os.scandir(folder):
        if entry.is_dir():
            tree[entry.name] = read_tree(entry.path, files)
        else:
            content = files.setdefault(entry.inode(), [pathlib.Path(entry.path).read_bytes()])
            tree[entry.name] = content
    return tree
