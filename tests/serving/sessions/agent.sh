# An agent without any library: two turns by curl. Its last line is the reward.
row=$(cat)
question=$(printf '%s' "$row" | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["prompt"]))')
ask() {
    curl --silent --fail "$OPENAI_BASE_URL/chat/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"any\", \"messages\": $1}"
}
reply=$(ask "$question") || exit 1
messages=$(printf '%s' "$reply" | QUESTION="$question" python3 -c '
import json, os, sys
message = json.load(sys.stdin)["choices"][0]["message"]
print(json.dumps([*json.loads(os.environ["QUESTION"]), message, {"role": "user", "content": "Go on."}]))')
ask "$messages" > "$TMPDIR/reply.json" || exit 1
echo "done"
echo '{"reward": 0.25}'
