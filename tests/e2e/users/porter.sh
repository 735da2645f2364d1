# Somebody with a Keras script, which is to run on one rank and on two.
cat > script.py <<'SCRIPT'
import numpy as np
import keras
from keras import layers
from keras.callbacks import EarlyStopping

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int64")
inputs = keras.Input((8,))
hidden = layers.Dropout(0.1)(layers.Dense(16, activation="relu")(inputs))
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(hidden))
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=4, validation_split=0.25, callbacks=[EarlyStopping(patience=2)], verbose=0)
model.save("model.keras")
print("accuracy %.6f" % keras.models.load_model("model.keras").evaluate(x, y, verbose=0)[1])
SCRIPT
sed -i 's/^import keras$/import dptrain as keras/; s/^from keras/from dptrain/' script.py
python script.py | tee alone
mpirun -n 2 python script.py | sort -u | tee both
cmp alone both
