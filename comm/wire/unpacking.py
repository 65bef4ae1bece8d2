"""Unpack msgpack that another peer has sent or stored: `read_msgpack`, which bounds what msgpack allocates.

msgpack allocates each array in the size that its header claims. Without `max_array_len`, 16 kB of nested headers
keep the event loop busy for 0.15 s. Arrays become tuples. Extension types are refused, and so are maps with a key that
is neither a string nor bytes.
"""

from functools import partial

import msgpack

# Call read_msgpack(data, max_array_len=n), where n is the most items that an array may have. If the bytes are malformed
# or exceed a limit, msgpack raises exceptions of many classes.
read_msgpack = partial(msgpack.unpackb, use_list=False, strict_map_key=True, max_ext_len=0)
