"""The public names of Keras 3.15 by module, so that what dptrain lacks is told from what is misspelt."""

# Names of modules without "keras."; the test in tests/against_keras compares them with an installed Keras.
KERAS_NAMES: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "": """
            DTypePolicy FloatDTypePolicy Function Initializer Input InputSpec KerasTensor Layer Loss Metric Model
            Operation Optimizer Quantizer Regularizer RematScope Sequential StatelessScope SymbolicScope Variable
            activations applications backend callbacks config constraints datasets device distillation distribution
            dtype_policies export initializers layers legacy losses metrics mixed_precision models name_scope ops
            optimizers preprocessing quantizers random regularizers remat saving tree utils version visualization
            wrappers
        """,
        "activations": """
            celu deserialize elu exponential gelu get glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh
            leaky_relu linear log_sigmoid log_softmax mish relu relu6 selu serialize sigmoid silu soft_shrink
            softmax softplus softsign sparse_plus sparse_sigmoid sparsemax squareplus swish tanh tanh_shrink
            threshold
        """,
        "applications": """
            ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge DenseNet121 DenseNet169 DenseNet201
            EfficientNetB0 EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 EfficientNetB6
            EfficientNetB7 EfficientNetV2B0 EfficientNetV2B1 EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L
            EfficientNetV2M EfficientNetV2S InceptionResNetV2 InceptionV3 MobileNet MobileNetV2 MobileNetV3Large
            MobileNetV3Small NASNetLarge NASNetMobile ResNet101 ResNet101V2 ResNet152 ResNet152V2 ResNet50
            ResNet50V2 VGG16 VGG19 Xception convnext densenet efficientnet efficientnet_v2 imagenet_utils
            inception_resnet_v2 inception_v3 mobilenet mobilenet_v2 mobilenet_v3 nasnet resnet resnet50 resnet_v2
            vgg16 vgg19 xception
        """,
        "applications.convnext": """
            ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge decode_predictions preprocess_input
        """,
        "applications.densenet": """
            DenseNet121 DenseNet169 DenseNet201 decode_predictions preprocess_input
        """,
        "applications.efficientnet": """
            EfficientNetB0 EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 EfficientNetB6
            EfficientNetB7 decode_predictions preprocess_input
        """,
        "applications.efficientnet_v2": """
            EfficientNetV2B0 EfficientNetV2B1 EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L EfficientNetV2M
            EfficientNetV2S decode_predictions preprocess_input
        """,
        "applications.imagenet_utils": """
            decode_predictions preprocess_input
        """,
        "applications.inception_resnet_v2": """
            InceptionResNetV2 decode_predictions preprocess_input
        """,
        "applications.inception_v3": """
            InceptionV3 decode_predictions preprocess_input
        """,
        "applications.mobilenet": """
            MobileNet decode_predictions preprocess_input
        """,
        "applications.mobilenet_v2": """
            MobileNetV2 decode_predictions preprocess_input
        """,
        "applications.mobilenet_v3": """
            decode_predictions preprocess_input
        """,
        "applications.nasnet": """
            NASNetLarge NASNetMobile decode_predictions preprocess_input
        """,
        "applications.resnet": """
            ResNet101 ResNet152 ResNet50 decode_predictions preprocess_input
        """,
        "applications.resnet50": """
            ResNet50 decode_predictions preprocess_input
        """,
        "applications.resnet_v2": """
            ResNet101V2 ResNet152V2 ResNet50V2 decode_predictions preprocess_input
        """,
        "applications.vgg16": """
            VGG16 decode_predictions preprocess_input
        """,
        "applications.vgg19": """
            VGG19 decode_predictions preprocess_input
        """,
        "applications.xception": """
            Xception decode_predictions preprocess_input
        """,
        "backend": """
            backend clear_session epsilon floatx get_uid image_data_format is_float_dtype is_int_dtype
            is_keras_tensor result_type set_epsilon set_floatx set_image_data_format standardize_dtype
        """,
        "callbacks": """
            BackupAndRestore CSVLogger Callback CallbackList EarlyStopping History LambdaCallback
            LearningRateScheduler ModelCheckpoint OrbaxCheckpoint ProgbarLogger ReduceLROnPlateau RemoteMonitor
            SwapEMAWeights TensorBoard TerminateOnNaN
        """,
        "config": """
            backend disable_flash_attention disable_interactive_logging disable_traceback_filtering dtype_policy
            enable_flash_attention enable_interactive_logging enable_traceback_filtering
            enable_unsafe_deserialization epsilon floatx image_data_format is_flash_attention_enabled
            is_interactive_logging_enabled is_nnx_enabled is_traceback_filtering_enabled max_epochs
            max_steps_per_epoch set_backend set_dtype_policy set_epsilon set_floatx set_image_data_format
            set_max_epochs set_max_steps_per_epoch
        """,
        "constraints": """
            Constraint MaxNorm MinMaxNorm NonNeg UnitNorm deserialize get max_norm min_max_norm non_neg serialize
            unit_norm
        """,
        "datasets": """
            boston_housing california_housing cifar10 cifar100 fashion_mnist imdb mnist reuters
        """,
        "datasets.boston_housing": """
            load_data
        """,
        "datasets.california_housing": """
            load_data
        """,
        "datasets.cifar10": """
            load_data
        """,
        "datasets.cifar100": """
            load_data
        """,
        "datasets.fashion_mnist": """
            load_data
        """,
        "datasets.imdb": """
            get_word_index load_data
        """,
        "datasets.mnist": """
            load_data
        """,
        "datasets.reuters": """
            get_label_names get_word_index load_data
        """,
        "distillation": """
            DistillationLoss Distiller FeatureDistillation LogitsDistillation
        """,
        "distribution": """
            DataParallel DeviceMesh LayoutMap ModelParallel TensorLayout distribute_tensor distribution
            get_device_count initialize list_devices set_distribution
        """,
        "dtype_policies": """
            AWQDTypePolicy DTypePolicy DTypePolicyMap FloatDTypePolicy GPTQDTypePolicy Int4DTypePolicy
            QuantizedDTypePolicy QuantizedFloat8DTypePolicy deserialize get serialize
        """,
        "export": """
            ExportArchive
        """,
        "initializers": """
            Constant GlorotNormal GlorotUniform HeNormal HeUniform Identity IdentityInitializer Initializer
            LecunNormal LecunUniform Ones Orthogonal OrthogonalInitializer RandomNormal RandomUniform STFT
            STFTInitializer TruncatedNormal VarianceScaling Zeros constant deserialize get glorot_normal
            glorot_uniform he_normal he_uniform identity lecun_normal lecun_uniform ones orthogonal random_normal
            random_uniform serialize stft truncated_normal variance_scaling zeros
        """,
        "layers": """
            Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
            AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
            AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average AveragePooling1D AveragePooling2D
            AveragePooling3D AvgPool1D AvgPool2D AvgPool3D BatchNormalization Bidirectional CategoryEncoding
            CenterCrop Concatenate ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D
            Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Convolution1D
            Convolution1DTranspose Convolution2D Convolution2DTranspose Convolution3D Convolution3DTranspose
            Cropping1D Cropping2D Cropping3D CutMix Dense DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout
            ELU EinsumDense Embedding Equalization Flatten FlaxLayer GRU GRUCell GaussianDropout GaussianNoise
            GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalAvgPool1D GlobalAvgPool2D
            GlobalAvgPool3D GlobalMaxPool1D GlobalMaxPool2D GlobalMaxPool3D GlobalMaxPooling1D GlobalMaxPooling2D
            GlobalMaxPooling3D GroupNormalization GroupQueryAttention HashedCrossing Hashing Identity Input
            InputLayer InputSpec IntegerLookup JaxLayer LSTM LSTMCell Lambda Layer LayerNormalization LeakyReLU
            Masking MaxNumBoundingBoxes MaxPool1D MaxPool2D MaxPool3D MaxPooling1D MaxPooling2D MaxPooling3D Maximum
            MelSpectrogram Minimum MixUp MultiHeadAttention Multiply Normalization PReLU Permute Pipeline
            RMSNormalization RNN RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter
            RandomContrast RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur
            RandomGrayscale RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation
            RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom ReLU RepeatVector Rescaling
            Reshape Resizing ReversibleEmbedding STFTSpectrogram SeparableConv1D SeparableConv2D
            SeparableConvolution1D SeparableConvolution2D SimpleRNN SimpleRNNCell Softmax Solarization
            SpatialDropout1D SpatialDropout2D SpatialDropout3D SpectralNormalization StackedRNNCells StringLookup
            Subtract TFSMLayer TextVectorization TimeDistributed TorchModuleWrapper UnitNormalization UpSampling1D
            UpSampling2D UpSampling3D Wrapper ZeroPadding1D ZeroPadding2D ZeroPadding3D add average concatenate
            deserialize dot maximum minimum multiply serialize subtract
        """,
        "legacy": """
            saving
        """,
        "legacy.saving": """
            deserialize_keras_object serialize_keras_object
        """,
        "losses": """
            BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy CategoricalFocalCrossentropy
            CategoricalGeneralizedCrossEntropy CategoricalHinge Circle CosineSimilarity Dice Hinge Huber
            KLDivergence LogCosh Loss MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
            MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy SquaredHinge Tversky
            binary_crossentropy binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
            categorical_generalized_cross_entropy categorical_hinge circle cosine_similarity ctc deserialize dice
            get hinge huber kl_divergence log_cosh mean_absolute_error mean_absolute_percentage_error
            mean_squared_error mean_squared_logarithmic_error poisson serialize sparse_categorical_crossentropy
            squared_hinge tversky
        """,
        "metrics": """
            AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy CategoricalCrossentropy
            CategoricalHinge ConcordanceCorrelation CosineSimilarity F1Score FBetaScore FalseNegatives
            FalsePositives Hinge IoU KLDivergence LogCoshError Mean MeanAbsoluteError MeanAbsolutePercentageError
            MeanIoU MeanMetricWrapper MeanSquaredError MeanSquaredLogarithmicError Metric OneHotIoU OneHotMeanIoU
            PearsonCorrelation Poisson Precision PrecisionAtRecall R2Score Recall RecallAtPrecision
            RootMeanSquaredError SensitivityAtSpecificity SparseCategoricalAccuracy SparseCategoricalCrossentropy
            SparseTopKCategoricalAccuracy SpecificityAtSensitivity SquaredHinge Sum TopKCategoricalAccuracy
            TrueNegatives TruePositives binary_accuracy binary_crossentropy binary_focal_crossentropy
            categorical_accuracy categorical_crossentropy categorical_focal_crossentropy categorical_hinge
            concordance_correlation deserialize get hinge huber kl_divergence log_cosh mean_absolute_error
            mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error pearson_correlation
            poisson serialize sparse_categorical_accuracy sparse_categorical_crossentropy
            sparse_top_k_categorical_accuracy squared_hinge top_k_categorical_accuracy
        """,
        "mixed_precision": """
            DTypePolicy LossScaleOptimizer Policy dtype_policy global_policy set_dtype_policy set_global_policy
        """,
        "models": """
            Model Sequential clone_model load_model model_from_json save_model
        """,
        "ops": """
            abs absolute adaptive_average_pool adaptive_max_pool add all allclose amax amin angle any append arange
            arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argpartition argsort array
            array_split associative_scan average average_pool bartlett batch_normalization binary_crossentropy
            bincount bitwise_and bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
            bitwise_xor blackman broadcast_to cast categorical_crossentropy cbrt cdist ceil celu cholesky
            cholesky_inverse clip concatenate cond conj conjugate conv conv_transpose convert_to_numpy
            convert_to_tensor copy corrcoef correlate cos cosh count_nonzero cross ctc_decode ctc_loss cumprod
            cumsum custom_gradient deg2rad depth_to_space depthwise_conv det diag diagflat diagonal diff digitize
            divide divide_no_nan dot dot_product_attention dsplit dstack dtype eig eigh einsum elu empty empty_like
            equal erf erfc erfinv exp exp2 expand_dims expm1 extract_sequences eye fabs fft fft2 flip fliplr flipud
            floor floor_divide fmax fmin fmod fold fori_loop full full_like gcd gelu geomspace get_item glu greater
            greater_equal hamming hanning hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh heaviside
            histogram hsplit hstack hypot i0 identity ifft2 imag image in_top_k inner inv irfft is_tensor isclose
            isfinite isin isinf isnan isneginf isposinf isreal istft jvp kaiser kron layer_normalization lcm ldexp
            leaky_relu left_shift less less_equal linalg linspace log log10 log1p log2 log_sigmoid log_softmax
            logaddexp logaddexp2 logdet logical_and logical_not logical_or logical_xor logspace logsumexp lstsq
            lu_factor map matmul matrix_rank max max_pool maximum mean median meshgrid min minimum mod moments
            moveaxis multi_hot multiply nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian
            nanmin nanpercentile nanprod nanquantile nanstd nansum nanvar ndim negative nextafter nn nonzero norm
            normalize not_equal numpy one_hot ones ones_like outer pad percentile pinv polar power prod psnr ptp qr
            quantile rad2deg ravel real rearrange reciprocal relu relu6 repeat reshape rfft right_shift
            rms_normalization roll rot90 round rsqrt saturate_cast scan scatter scatter_update searchsorted
            segment_max segment_min segment_prod segment_sum select selu separable_conv shape sigmoid sign signbit
            silu sin sinc sinh size slice slice_update slogdet soft_shrink softmax softplus softsign solve
            solve_triangular sort space_to_depth sparse_categorical_crossentropy sparse_plus sparse_sigmoid
            sparsemax split sqrt square squareplus squeeze stack std stft stop_gradient subtract sum svd swapaxes
            swish switch take take_along_axis tan tanh tanh_shrink tensordot threshold tile top_k trace transpose
            trapezoid tri tril triu true_divide trunc unfold unique unravel_index unstack vander var vdot vectorize
            vectorized_map view view_as_complex view_as_real vsplit vstack where while_loop zeros zeros_like
        """,
        "ops.image": """
            affine_transform crop_images elastic_transform extract_patches extract_patches_3d gaussian_blur
            hsv_to_rgb map_coordinates pad_images perspective_transform resize rgb_to_grayscale rgb_to_hsv
            scale_and_translate sobel_edges ssim
        """,
        "ops.linalg": """
            cholesky cholesky_inverse det eig eigh inv jvp lstsq lu_factor matrix_rank norm pinv qr solve
            solve_triangular svd
        """,
        "ops.nn": """
            adaptive_average_pool adaptive_max_pool average_pool batch_normalization binary_crossentropy
            categorical_crossentropy celu conv conv_transpose ctc_decode ctc_loss depth_to_space depthwise_conv
            dot_product_attention elu fold gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh
            layer_normalization leaky_relu log_sigmoid log_softmax max_pool moments multi_hot normalize one_hot
            polar psnr relu relu6 rms_normalization selu separable_conv sigmoid silu soft_shrink softmax softplus
            softsign space_to_depth sparse_categorical_crossentropy sparse_plus sparse_sigmoid sparsemax squareplus
            swish tanh_shrink threshold unfold
        """,
        "ops.numpy": """
            abs absolute add all allclose amax amin angle any append arange arccos arccosh arcsin arcsinh arctan
            arctan2 arctanh argmax argmin argpartition argsort array array_split average bartlett bincount
            bitwise_and bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
            blackman broadcast_to cbrt ceil clip concatenate conj conjugate copy corrcoef correlate cos cosh
            count_nonzero cross cumprod cumsum deg2rad diag diagflat diagonal diff digitize divide divide_no_nan dot
            dsplit dstack einsum empty empty_like equal exp exp2 expand_dims expm1 eye fabs flip fliplr flipud floor
            floor_divide fmax fmin fmod full full_like gcd geomspace get_item greater greater_equal hamming hanning
            heaviside histogram hsplit hstack hypot i0 identity imag inner isclose isfinite isin isinf isnan
            isneginf isposinf isreal kaiser kron lcm ldexp left_shift less less_equal linspace log log10 log1p log2
            logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logspace matmul max maximum mean
            median meshgrid min minimum mod moveaxis multiply nan_to_num nanargmax nanargmin nancumprod nancumsum
            nanmax nanmean nanmedian nanmin nanpercentile nanprod nanquantile nanstd nansum nanvar ndim negative
            nextafter nonzero not_equal ones ones_like outer pad percentile power prod ptp quantile rad2deg ravel
            real reciprocal repeat reshape right_shift roll rot90 round searchsorted select sign signbit sin sinc
            sinh size slogdet sort split sqrt square squeeze stack std subtract sum swapaxes take take_along_axis
            tan tanh tensordot tile trace transpose trapezoid tri tril triu true_divide trunc unique unravel_index
            vander var vdot vectorize view vsplit vstack where zeros zeros_like
        """,
        "optimizers": """
            Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion LossScaleOptimizer MultiOptimizer Muon Nadam
            Optimizer OptimizerMap RMSprop SGD ScheduleFreeAdamW deserialize get legacy schedules serialize
        """,
        "optimizers.legacy": """
            Adagrad Adam Ftrl Optimizer RMSprop SGD
        """,
        "optimizers.schedules": """
            CosineDecay CosineDecayRestarts ExponentialDecay InverseTimeDecay LearningRateSchedule
            PiecewiseConstantDecay PolynomialDecay deserialize serialize
        """,
        "preprocessing": """
            image image_dataset_from_directory sequence text_dataset_from_directory timeseries_dataset_from_array
        """,
        "preprocessing.image": """
            array_to_img img_to_array load_img save_img smart_resize
        """,
        "preprocessing.sequence": """
            pad_sequences
        """,
        "quantizers": """
            AWQConfig AbsMaxQuantizer Float8QuantizationConfig GPTQConfig Int4QuantizationConfig
            Int8QuantizationConfig QuantizationConfig Quantizer abs_max_quantize
            abs_max_quantize_grouped_with_zero_point compute_float8_amax_history compute_float8_scale deserialize
            fake_quant_with_min_max_vars get pack_int4 quantize_and_dequantize serialize unpack_int4
        """,
        "random": """
            SeedGenerator beta binomial categorical dropout gamma normal randint shuffle truncated_normal uniform
        """,
        "regularizers": """
            L1 L1L2 L2 OrthogonalRegularizer Regularizer deserialize get l1 l1_l2 l2 orthogonal_regularizer
            serialize
        """,
        "saving": """
            CustomObjectScope KerasFileEditor custom_object_scope deserialize_keras_object get_custom_objects
            get_registered_name get_registered_object load_model load_weights register_keras_serializable save_model
            save_weights serialize_keras_object
        """,
        "tree": """
            MAP_TO_NONE assert_same_paths assert_same_structure flatten flatten_with_path is_nested lists_to_tuples
            map_shape_structure map_structure map_structure_up_to pack_sequence_as traverse
        """,
        "utils": """
            Config CustomObjectScope FeatureSpace Progbar PyDataset Sequence array_to_img
            audio_dataset_from_directory bounding_boxes clear_session custom_object_scope deserialize_keras_object
            disable_interactive_logging enable_interactive_logging get_custom_objects get_file get_registered_name
            get_registered_object get_source_inputs image_dataset_from_directory img_to_array
            is_interactive_logging_enabled is_keras_tensor legacy load_img model_to_dot normalize
            pack_x_y_sample_weight pad_sequences plot_model register_keras_serializable save_img
            serialize_keras_object set_random_seed split_dataset standardize_dtype text_dataset_from_directory
            timeseries_dataset_from_array to_categorical unpack_x_y_sample_weight
        """,
        "utils.bounding_boxes": """
            affine_transform clip_to_image_size compute_ciou compute_iou convert_format crop decode_deltas_to_boxes
            encode_box_to_deltas pad
        """,
        "utils.legacy": """
            deserialize_keras_object serialize_keras_object
        """,
        "visualization": """
            draw_bounding_boxes draw_segmentation_masks plot_bounding_box_gallery plot_image_gallery
            plot_segmentation_mask_gallery
        """,
        "wrappers": """
            SKLearnClassifier SKLearnRegressor SKLearnTransformer
        """,
    }.items()
}
