"""The kinds of layers whose options are drawn together."""

from tests.options import attention, convolution, pooling, recurrent
from tests.options.check import Kind

KINDS = {
    "recurrent": Kind(recurrent.OPTIONS, recurrent.allowed, recurrent.draw, recurrent.GROUPS),
    "convolutional recurrent": Kind(
        recurrent.OPTIONS_OF_CONV_LSTM, recurrent.allowed_of_conv_lstm, recurrent.draw_conv_lstm
    ),
    "attention": Kind(attention.OPTIONS, attention.allowed, attention.draw, attention.GROUPS),
    "attention without heads": Kind(
        attention.OPTIONS_WITHOUT_HEADS, lambda options: options, attention.draw_without_heads
    ),
    "dot-product attention": Kind(
        attention.OPTIONS_OF_OP, attention.allowed_of_op, attention.draw_op, attention.GROUPS_OF_OP
    ),
    "convolution": Kind(convolution.OPTIONS, convolution.allowed, convolution.draw, convolution.GROUPS),
    "pooling": Kind(pooling.OPTIONS, pooling.allowed, pooling.draw, pooling.GROUPS),
}
