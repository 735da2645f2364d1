"""Variables of users' own."""

import numpy as np

import dptrain as keras


def test_assignments_return_the_new_value():
    variable = keras.Variable([1.0, 2.0])
    assert [variable.assign([3.0, 4.0]).numpy().tolist(), variable.assign_add([1.0, 1.0]).numpy().tolist()] == [
        [3, 4],
        [4, 5],
    ]
    assert variable.assign_sub([4.0, 4.0]).numpy().tolist() == variable.numpy().tolist() == [0, 1]


def test_arrays_as_initializers():
    class Shifted(keras.layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight((2,), initializer=np.array([1.0, 2.0]), name="scale")
            self.shift = self.add_variable((2,), initializer="zeros", name="shift")

        def call(self, x):
            return x * self.scale + self.shift

    np.testing.assert_array_equal(Shifted()(np.ones((1, 2), np.float32)).numpy(), [[1, 2]])
    optimizer = keras.optimizers.SGD(0.1)
    np.testing.assert_array_equal(optimizer.add_variable((2,), initializer=np.array([1.0, 2.0])).numpy(), [1, 2])


def test_a_tensor_and_a_variable_with_their_axes_reversed():
    values = np.arange(6.0).reshape(1, 2, 3)
    for reversed_tensor in (keras.ops.convert_to_tensor(values), keras.Variable(values)):
        np.testing.assert_array_equal(reversed_tensor.T.numpy(), values.T)
