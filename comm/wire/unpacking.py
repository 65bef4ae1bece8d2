"""Unpack msgpack that another peer has sent or stored: `read_msgpack`, which bounds what msgpack allocates.

msgpack allocates each array in the size that its header claims. Without `max_array_len`, 16 kB of nested headers
keep the event loop busy for 0.15 s. Arrays become tuples. There are no extension types, and maps have names as keys.
"""

from functools import partial

import msgpack

# Besides the bytes, callers pass max_array_len, the most items of an array. For malformed bytes or an exceeded limit,
# msgpack raises exceptions of many classes.
read_msgpack = partial(msgpack.unpackb, use_list=False, strict_map_key=True, max_ext_len=0)
