# An engineer who serves a model: exports it, and asks it over HTTP.
python -m dptrain --data houses.csv --target price --epochs 2 --out runs/houses
python -m dptrain export runs/houses --format program --out houses.program
python -m dptrain explain runs/houses | grep "parameters"
python -m dptrain serve runs/houses --port 0 > served & server=$!
until grep -q "serves" served; do kill -0 "$server"; sleep 0.2; done
python - "$(cut -d " " -f 1 served)" <<'SCRIPT'
import sys, urllib.request
body = b'[{"area": 0.1, "rooms": 0.2, "town": "Rome"}, {"area": 1, "rooms": 0, "town": "Lima"}]'
print(urllib.request.urlopen(sys.argv[1] + "/predict", body, timeout=100).read().decode())
SCRIPT
kill "$server" && wait "$server"
python - <<'SCRIPT'
import numpy as np
from dptrain.models import load_model
from dptrain.saving import load_program
model = load_model("runs/houses/model.keras")
x = np.ones((3, *model.input_shape[1:]), "float32")
assert np.allclose(load_program("houses.program")(x), model.predict(x, verbose=0))
SCRIPT
fails python -m dptrain predict runs/houses --data other.csv
grep "other.csv" said
