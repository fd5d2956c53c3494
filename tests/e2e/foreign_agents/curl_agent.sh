# curl, jq and bc: an agent without any library.
row=$(cat)
tools='[{"type": "function", "function": {"name": "calculator", "parameters":
    {"type": "object", "properties": {"expression": {"type": "string"}}}}}]'
messages=$(jq -c .prompt <<< "$row")
answer=""
for turn in 1 2 3; do
    reply=$(jq -cn --argjson messages "$messages" --argjson tools "$tools" \
        '{model: "any", messages: $messages, tools: $tools}' |
        curl --silent --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
            -H 'Content-Type: application/json' -d @-) || { echo "$reply" >&2; exit 1; }
    message=$(jq -c '.choices[0].message' <<< "$reply")
    messages=$(jq -c --argjson message "$message" '. + [$message]' <<< "$messages")
    answer=$(jq -r '.content // ""' <<< "$message")
    calls=$(jq -r '.tool_calls // [] | length' <<< "$message")
    [ "$calls" = 0 ] && break
    for ((number = 0; number < calls; number++)); do
        expression=$(jq -r ".tool_calls[$number].function.arguments | fromjson | .expression" <<< "$message")
        result=$(bc <<< "$expression" 2> /dev/null) || result=Error
        messages=$(jq -c --argjson message "$message" --argjson number "$number" --arg result "${result:-Error}" \
            '. + [{role: "tool", tool_call_id: $message.tool_calls[$number].id, content: $result}]' <<< "$messages")
    done
done
truth=$(jq -r .ground_truth <<< "$row")
[ "$(echo $answer)" = "#$truth" ] && echo '{"reward": 1}' || echo '{"reward": 0}'
