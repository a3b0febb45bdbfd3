// Every header that the operators need, before a device is named and operators/all.inl follows.
#pragma once
#include <cmath>
#include <utility>

#include "../../core/attention.h"
#include "../checks.h"
#include "../heads.h"
#include "../shapes.h"
#include "../views.h"
