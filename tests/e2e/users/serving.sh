# An engineer who serves a model: exports it, and asks it over HTTP.
python -m dptrain --data houses.csv --target price --epochs 2 --out runs/houses
python -m dptrain export runs/houses --format program --out houses.program
python -m dptrain explain runs/houses | grep "parameters"
python "$EXAMPLES/serve.py" --help | grep -i "usage"
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
