#!/bin/sh
# What a bare machine with PyTorch, numba and a GPU needs beside this tree, and the command for it.
#
#     [CACHE_PYTHON=python3.12] experiments/gpu.sh [PYTHON_VERSION]      default 3.12, the version there
#
# Wheels of the tested versions go to runs/gpu/wheels: pydantic, which `placement` needs, and what
# policies need. Where CACHE_PYTHON names an interpreter of that version with PyTorch and the numba
# that is there (NUMBA, default 0.68.0), compiled kernels go to runs/gpu/kernels. numba finds them
# again for the same version of itself, the same path of the files, the same times of them and the
# same processor features, so all are fixed here and there; the script says how many it found.
# It also shows that the wheels install without a network, and that the script starts.
set -eu
cd "$(dirname "$0")/.."
version=${1:-3.12}
abi=cp$(echo "$version" | tr -d .)
python=${PYTHON:-.venv/bin/python}
there=/tmp/device-placement-rl
wheels=runs/gpu/wheels kernels=runs/gpu/kernels
rm -rf "$wheels" "$kernels" && mkdir -p "$wheels" "$kernels"

for name in pydantic pydantic_core annotated-types typing-inspection typing_extensions \
    gymnasium Farama-Notifications stable_baselines3 hydra-core omegaconf; do
    line=$(grep -i "^$name==" constraints.txt) || { echo "constraints.txt names no $name" >&2 && exit 1; }
    echo "${line%%;*}"
done >"$wheels/wanted.txt"
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp --abi "$abi" --abi abi3 --abi none --platform manylinux2014_x86_64 \
    -d "$wheels" -r "$wheels/wanted.txt"
# Hydra's parser is published as source only.
grep -i '^antlr4-python3-runtime==' constraints.txt | xargs "$python" -m pip wheel -q --no-deps -w "$wheels"
rm "$wheels/wanted.txt"

touched="find . -name '*.py' -exec touch -d @1700000000 {} +"
install="-m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $there/.site"
settings="PYTHONPATH=$there/.site:$there PYTHONUNBUFFERED=1 NUMBA_CPU_NAME=x86-64-v3 \
NUMBA_CPU_FEATURES=+avx2,+fma,+bmi,+bmi2,+popcnt,+sse4.2 OPENBLAS_NUM_THREADS=1" # or forks warn
if [ -n "${CACHE_PYTHON:-}" ]; then
    home=$PWD numba=$("$CACHE_PYTHON" -c 'import numba; print(numba.__version__)')
    [ "$numba" = "${NUMBA:-0.68.0}" ] || { echo "numba is $numba, there ${NUMBA:-0.68.0}" >&2 && exit 1; }
    rm -rf $there && mkdir $there
    git ls-files -z | xargs -0 cp --parents -t $there
    (
        cd $there && eval "$touched"
        "$CACHE_PYTHON" $install "$home/$wheels"/*.whl
        env $settings NUMBA_CACHE_DIR="$home/$kernels" "$CACHE_PYTHON" -c \
            'from experiments.gpu.checks import warm_up; warm_up()'
    )
    rm -rf $there
else
    echo "CACHE_PYTHON is not set: kernels are compiled there, beside the first sections" >&2
fi

mib=$(($({ git ls-files -z | xargs -0 cat; cat $wheels/* && find $kernels -type f -exec cat {} +; } | wc -c) >> 20))
command="rm -rf $there && cp -r . $there && cd $there && $touched && python3 $install $wheels/*.whl && \
export $settings NUMBA_CACHE_DIR=$there/$kernels && python3 -m experiments.gpu --out \$OUT --more"
[ "$mib" -lt 64 ] || { echo "$mib MiB are more than the 64 that travel" >&2 && exit 1; }
[ ${#command} -le 2000 ] || { echo "the command has ${#command} letters, more than 2,000" >&2 && exit 1; }
cat <<END
$mib MiB travel. Carry $wheels and $kernels along, allow 530 s for each, and run there first this, then that:

${command% --more}

$command
END
