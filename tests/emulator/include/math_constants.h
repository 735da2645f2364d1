#pragma once
#include "emulator/device.h"
