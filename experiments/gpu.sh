#!/bin/sh
# What a bare machine with PyTorch, numba and a GPU needs beside this tree, and the command for it.
#
#     experiments/gpu.sh [PYTHON_VERSION]      default 3.12, the version there
#
# Wheels of the tested versions go to runs/gpu/wheels: pydantic, which `placement` needs, and what
# policies need. Where CACHE_PYTHON names an interpreter of that version with the same numba,
# compiled kernels go to runs/gpu/kernels: numba finds them again for the same path of the files,
# the same times of them and the same processor features, so all three are fixed here and there.
set -eu
cd "$(dirname "$0")/.."
version=${1:-3.12}
abi=cp$(echo "$version" | tr -d .)
python=${PYTHON:-.venv/bin/python}
there=/tmp/device-placement-rl
wheels=runs/gpu/wheels kernels=runs/gpu/kernels
rm -rf "$wheels" && mkdir -p "$wheels" "$kernels"

for name in pydantic pydantic_core annotated-types typing-inspection typing_extensions \
    gymnasium Farama-Notifications stable_baselines3 hydra-core omegaconf; do
    grep -i "^$name==" constraints.txt
done | sed 's/ *;.*//' >"$wheels/wanted.txt"
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp --abi "$abi" --abi abi3 --abi none --platform manylinux2014_x86_64 \
    -d "$wheels" -r "$wheels/wanted.txt"
# Hydra's parser is published as source only.
grep -i '^antlr4-python3-runtime==' constraints.txt | xargs "$python" -m pip wheel -q --no-deps -w "$wheels"
rm "$wheels/wanted.txt"

settings="NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+avx2,+fma,+bmi,+bmi2,+popcnt,+sse4.2"
prepare="rm -rf $there && cp -r . $there && cd $there && find . -name '*.py' -exec touch -d @1700000000 {} +"
if [ -n "${CACHE_PYTHON:-}" ]; then
    home=$PWD
    (
        git ls-files -z | xargs -0 cp --parents -t "$(rm -rf $there && mkdir $there && echo $there)"
        cd $there && find . -name '*.py' -exec touch -d @1700000000 {} +
        env $settings NUMBA_CACHE_DIR="$home/$kernels" PYTHONPATH=$there "$CACHE_PYTHON" -c \
            'from experiments.runs import warm; warm(("best_of", "heft", "macro_search"))'
        rm -rf $there
    )
else
    echo "CACHE_PYTHON is not set: kernels are compiled there, two minutes of one core" >&2
fi

du -sh "$wheels" "$kernels" >&2
cat <<END
Carry $wheels and $kernels along, and run there (a part each, then fetch \$OUT):

$prepare && python3 -m pip install -q --no-index --no-deps --upgrade --target $there/.site $wheels/*.whl && export PYTHONPATH=$there/.site:$there PYTHONUNBUFFERED=1 $settings NUMBA_CACHE_DIR=$there/$kernels && python3 -m experiments.gpu --part check --out \$OUT

$prepare && python3 -m pip install -q --no-index --no-deps --upgrade --target $there/.site $wheels/*.whl && export PYTHONPATH=$there/.site:$there PYTHONUNBUFFERED=1 $settings NUMBA_CACHE_DIR=$there/$kernels && python3 -m experiments.gpu --part study --out \$OUT
END
