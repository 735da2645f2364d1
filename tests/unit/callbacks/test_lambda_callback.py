from dptrain.callbacks import CallbackList, LambdaCallback
from tests.unit.callbacks import build, toy


def test_every_function_is_called_in_its_place():
    calls = []

    def note(name):
        return lambda *arguments: calls.append(
            (name, *(argument for argument in arguments if isinstance(argument, int)))
        )

    callback = LambdaCallback(
        note("epoch begin"),
        note("epoch end"),
        note("train begin"),
        note("train end"),
        note("step begin"),
        note("step end"),
        on_test_begin=note("test begin"),
    )
    x, y = toy(20)
    build().fit(x, y, batch_size=10, verbose=0, callbacks=callback, validation_data=(x, y))
    assert calls == [
        ("train begin",),
        ("epoch begin", 0),
        ("step begin", 0),
        ("step end", 0),
        ("step begin", 1),
        ("step end", 1),
        ("test begin",),
        ("epoch end", 0),
        ("train end",),
    ]


def test_steps_cost_nothing_where_nobody_listens():
    assert not CallbackList(LambdaCallback(on_epoch_end=print))._has_batch_hooks("train")
    assert CallbackList(LambdaCallback(on_batch_end=print))._has_batch_hooks("train")
    assert CallbackList(LambdaCallback(on_predict_batch_end=print))._has_batch_hooks("predict")
